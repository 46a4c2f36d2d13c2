package core

// Locate is locateIn, for tests.
var Locate = locateIn
