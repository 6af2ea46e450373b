"""kvtierd: a daemon that keeps the KV cache of LLM inference engines in three tiers."""
