"""What was measured: samples of requests, their summary, the machine's rates and the model's floors."""
