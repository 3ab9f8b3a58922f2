"""Metrics of a whole validation set, which no mean over batches is: an AUC, an F1 score, a BLEU."""
