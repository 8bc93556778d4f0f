"""A Flower app: the digits of examples/digits.py stay where they are, and the parameters travel."""
