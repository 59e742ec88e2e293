"""What shallow prefill costs in quality: diagnostics, evaluation, tuning."""
