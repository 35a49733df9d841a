"""Read access to merged metrics: estimates with their intervals, and which domains, modes and depths exist.

Everything that is printed or drawn goes through here, so the card and the figures cannot say
anything that metrics.json does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DOMAIN_ORDER = ("chat", "maths", "code", "prose")
_MODE = r"(?P<mode>greedy|t[0-9.]*[0-9])"


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its 95 % interval; ``None`` where the inputs give no interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Measures:
    """Merged metrics, keyed as in docs/metrics.md."""

    metrics: Mapping[str, float]

    def get(self, key: str) -> Estimate | None:
        """The estimate under ``key``, or ``None`` if it was not measured."""
        if key not in self.metrics:
            return None
        return Estimate(self.metrics[key], self.metrics.get(f"{key}_low"), self.metrics.get(f"{key}_high"))

    def number(self, key: str) -> float | None:
        """The bare value under ``key``, or ``None`` if it was not measured."""
        return self.metrics.get(key)

    def domains(self, part: str) -> list[str]:
        """Domains of ``accept`` or ``bench``, in the project's order, others by name, ``all`` last."""
        pattern = rf"{part}\.(?!source\.)(?P<domain>[a-z0-9_]+)\.(?:greedy|t[0-9]|match_|overlap_)"
        return order_domains(self._matches(pattern, "domain"))

    def sources(self) -> list[str]:
        """Sources of the held-out prompts whose acceptance was measured, by name."""
        return sorted(self._matches(r"accept\.source\.(?P<source>[a-z0-9_]+)\.", "source"))

    def modes(self, part: str) -> list[str]:
        """Decoding modes of ``accept`` or ``bench``: greedy, then sampling by rising temperature."""
        found = self._matches(rf"{part}\.(?!source\.)[a-z0-9_]+\.{_MODE}\.", "mode")
        return order_modes(found)

    def depths(self, metric: str) -> list[int]:
        """Depths at which ``accept.csv``'s ``metric`` was measured in any domain and mode."""
        return sorted(map(int, self._matches(rf"accept\..+\.{metric}_(?P<depth>[0-9]+)$", "depth")))

    def draft_counts(self) -> list[int]:
        """Drafts per round (K) that were timed."""
        return sorted(map(int, self._matches(r"bench\..+\.k(?P<count>[0-9]+)\.", "count")))

    def lookup_counts(self) -> list[int]:
        """Token counts with which prompt look-up was timed; empty if it was not."""
        return sorted(map(int, self._matches(r"bench\..+\.prompt_lookup_(?P<count>[0-9]+)\.", "count")))

    def best_k(self, mode: str) -> int | None:
        """Drafts per round recommended for ``mode``."""
        value = self.number(f"bench.all.{mode}.best_k")
        return None if value is None else int(value)

    def _matches(self, pattern: str, group: str) -> set[str]:
        expression = re.compile(pattern)
        return {found.group(group) for key in self.metrics if (found := expression.match(key))}


def order_domains(found: Iterable[str]) -> list[str]:
    """The project's order, then others by name, then ``all``."""
    known = {name: position for position, name in enumerate(DOMAIN_ORDER)}
    return sorted(found, key=lambda name: (name == "all", known.get(name, len(known)), name))


def order_modes(found: Iterable[str]) -> list[str]:
    """``greedy``, then ``t<temperature>`` by temperature."""
    return sorted(found, key=lambda mode: (mode != "greedy", 0.0 if mode == "greedy" else float(mode[1:])))


def mode_name(mode: str) -> str:
    """``t0.5`` as readers write it: ``T = 0.5``."""
    return mode if mode == "greedy" else f"T = {mode[1:]}"
