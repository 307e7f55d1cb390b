"""Everything that needs a device, as one command: `python -m proof.gpu`, or `make gpu`.

It imports nothing but the standard library, because it has to say what is missing where everything else is.
"""
