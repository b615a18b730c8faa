"""What the commands of `crosspool` do. `cli.py` imports each only when it is called."""
