"""Where the tests find the server fixture of the Python client's tests, and the client's examples."""

import sys
from pathlib import Path

PYTHON_CLIENT = Path(__file__).resolve().parents[2] / "client/python"

sys.path[:0] = [str(PYTHON_CLIENT / "tests"), str(PYTHON_CLIENT / "examples")]
