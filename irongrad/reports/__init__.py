"""Reports on an artifact for people and scripts: analysis, profile, and one page of HTML. They need no PyTorch."""
