"""The trainer under its module name: `python -m unirl.train_unified_model --config-name=bagel/<recipe>`."""

import sys

from unirl.app.main import main

if __name__ == "__main__":
    sys.exit(main())
