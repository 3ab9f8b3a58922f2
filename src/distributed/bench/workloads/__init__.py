"""The models that are measured, and the hand-written loop and our Trainer that train them."""
