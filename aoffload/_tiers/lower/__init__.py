"""What tiers below the host have in common, and a tier of the program's own.

rules       `LowerStores`: which blocks of the host are stored, for tiers whose blocks the index knows
extension   `LowerTier`: a tier that a program adds, on the seam of the ledger
loop        `LowerWork`: the stores of such a tier, in the event loop of one runtime
"""
