"""Where the samples of a Keras run come from, and which of them each replica takes."""
