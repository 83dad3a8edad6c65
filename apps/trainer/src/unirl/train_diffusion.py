"""The trainer under its module name: `python -m unirl.train_diffusion --config-name=sd3/<recipe>`."""

import sys

from unirl.app.main import main

if __name__ == "__main__":
    sys.exit(main())
