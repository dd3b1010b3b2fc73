"""How many GPUs a service needs: memory first, then requests against goals, then why."""
