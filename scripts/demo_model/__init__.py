"""Makes the demo model that ships with Slicewise: corpus, tokenizer, training and evaluation."""
