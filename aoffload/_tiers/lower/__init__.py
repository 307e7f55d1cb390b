"""Code that tiers below the host share, and `LowerTier`, a tier that the program provides.

rules       `LowerStores`: plans stores from the host, for tiers whose blocks are in the index
extension   `LowerTier`: a tier that a program adds, on the seam of the ledger
loop        `TierWork`: what a runtime calls for each tier below the host, in its event loop; `LowerWork`: such a tier
"""
