"""What people look at: tables of parameters, memory of workers, the drawing of one parameter."""
