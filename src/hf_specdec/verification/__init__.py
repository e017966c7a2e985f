"""The target model: its cache, masks and attention, and the forwards that verify drafted trees."""
