"""From studies on disk to a page: what report, plots, tables and stats are made of. No torch here."""
