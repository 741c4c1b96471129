"""YAML as people mean it: what the keys of recipes and plans accept."""
