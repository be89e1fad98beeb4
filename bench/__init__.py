from cuadrilla.host.process import sleep_early

sleep_early()  # as the command does, before torch is loaded
