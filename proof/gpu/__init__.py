"""Everything that needs a device, as one command: `python -m proof.gpu`, or `make gpu`.

It imports nothing but the standard library, so that it can say what is missing where nothing else is installed.
"""
