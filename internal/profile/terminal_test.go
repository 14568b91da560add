package profile

import (
	"strings"
	"testing"
)

func TestTerminal(t *testing.T) {
	d, err := parseText([]byte("name: x\nbehavior: {terminal: zellij}\n"))
	if err != nil || d.Profile().Terminal != "zellij" {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := parseText([]byte("name: x\nbehavior: {terminal: screen}\n")); err == nil || !strings.Contains(err.Error(), `"screen" is not known`) {
		t.Errorf("screen: %v", err)
	}
}
