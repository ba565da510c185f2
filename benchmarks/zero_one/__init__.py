"""Does 0/1 Adam keep up with Adam at equal steps, where its variance is hard to know early? An LSTM, embedding rows."""
