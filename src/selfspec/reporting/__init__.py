"""What a run says about itself: merged metrics, tables, figures, notebook, page and model card."""
