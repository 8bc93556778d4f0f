"""Ranks: processes that train one state together, each on its own batches."""
