"""Scripts in the shape of well-known ones, without this library; `tests/e2e/test_scripts.py` launches them."""
