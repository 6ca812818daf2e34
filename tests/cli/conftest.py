"""The report tests render the sample plan of the spec tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "specs"))
