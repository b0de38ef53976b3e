"""Pipeline parallel training: a model cut by depth over ranks. ``schedules`` says who does what when, as data."""
