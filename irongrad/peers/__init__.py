"""Other compilers on the same training step: what they make of it, beside what IronGrad does."""
