"""Other ways into the compiler: a plain function, torch.compile, a JAX bundle."""
