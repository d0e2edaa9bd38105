"""What benchmarks run: shapes of models; requests, all there at the start or coming by a trace. Knows no engine."""
