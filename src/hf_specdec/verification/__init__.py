"""The target model seen from the loop: its cache, masks and attention, and the forwards that verify trees."""
