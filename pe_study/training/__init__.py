"""What train.py, tune.py and sweep.py are made of: one update, its data, faults, files, processes."""
