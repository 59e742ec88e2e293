"""What shallow prefill costs: perplexity, agreement, loops, needles and tasks under each visibility, beside other savings."""
