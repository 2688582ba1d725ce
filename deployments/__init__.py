"""What puts Slicewise somewhere and looks after it there: the `slicewise` command and its parts."""
