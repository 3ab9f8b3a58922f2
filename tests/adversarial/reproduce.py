"""`python -m tests.adversarial.reproduce SEED`: prints the script that reproduces a case without the harness."""

from __future__ import annotations

import sys

from tests.adversarial.case import draw
from tests.adversarial.script import script_of

if __name__ == "__main__":
    print(script_of(draw(int(sys.argv[1]))))
