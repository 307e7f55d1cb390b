"""Code that tiers below the host share, and `LowerTier`, a tier that the program provides.

rules       `LowerStores`: plans stores from the host, for tiers whose blocks are in the index
extension   `LowerTier`: a tier that a program adds, on the seam of the ledger
loop        `TierWork`: the base of all tiers below the host in a runtime's event loop; `LowerWork`: a `LowerTier` there
"""
