"""Changes of the weights under load, on a real runtime."""

from __future__ import annotations

import pytest

from proof import weights


@pytest.mark.parametrize("backend", weights.BACKENDS)
def test_no_token_of_another_epoch_is_read(backend: str) -> None:
    """Each token of KV says which weights computed it. `python -m proof.weights` makes 1,000 changes."""
    found = weights.run(backend, 40)
    assert found.num_wrong == 0 and found.num_changes == 40
    assert found.num_read > 1000 and found.num_back > 0, "KV was hit, and was found again"
