"""lab: experiments become run folders. Beside `cli`, the only room that touches disk or prints."""
