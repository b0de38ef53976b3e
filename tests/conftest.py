"""Settings for all tests: start the fork server while pytest is still collecting."""

import harness

harness.warm_up()
