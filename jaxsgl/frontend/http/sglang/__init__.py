"""SGLang's own HTTP endpoints: /generate, and what operators and trainers call."""
