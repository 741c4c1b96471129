"""What cli.py is made of: flags, lists, forecasts."""
