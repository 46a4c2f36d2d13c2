package cli

// Choices are the values of flags that completion offers.
var Choices = choices
