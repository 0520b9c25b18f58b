"""What runs the models: the Protocols, and eager torch behind them."""
