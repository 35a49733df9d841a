"""selfspec: retrofit multi-token-prediction heads and measure what they buy."""

__version__ = "0.1.0"
