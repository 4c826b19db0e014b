import sys

from tidekv_llm.cli import main

sys.exit(main())
