"""`python -m pe_study` is `pe-study`; `accelerate launch -m pe_study train RECIPE` starts here too."""

import sys

from pe_study.cli import main

if __name__ == "__main__":
    sys.exit(main())
