"""The compiler: `driver.py` is the whole flow on one page, and each stage has a folder."""
