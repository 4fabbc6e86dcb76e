"""How long a test may take: one generous number, enforced for every test by the watchdog in `conftest.py`.

No wait in a test has a bound of its own. A bound that a quiet machine keeps is missed by a busy one, and its verdict
would then be about the machine.
"""

import os

PATIENCE_S = float(os.environ.get("DILOCO_TESTS_PATIENCE_S", "900"))
