"""What the training scripts share: arguments, losses by name, models, splits, and mistakes told in one line."""
