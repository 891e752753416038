"""`python -m penstock.load.gpu`."""

import sys

from penstock.load.gpu.command import main

sys.exit(main())
