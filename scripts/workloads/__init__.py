"""What benchmarks run: shapes of models, and requests. Knows no engine and no clock."""
