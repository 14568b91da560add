package pvenode

import (
	"bytes"
	"encoding/json"
	"strings"
)

var pveshMethods = map[string]string{"get": "GET", "create": "POST", "set": "PUT", "delete": "DELETE"}

// pvesh calls the API on the node: pvesh get|create|set|delete PATH --key
// value. What its worker says comes before its result, and a worker that
// fails does not change its exit code.
func (t *tool) pvesh(args []string) int {
	if len(args) == 0 {
		return t.abort("no command specified")
	}
	method, ok := pveshMethods[args[0]]
	if !ok {
		return t.abort("unknown command 'pvesh " + args[0] + "'")
	}
	verb := args[0]
	kinds, required := map[string]optionKind{}, []string(nil)
	path := ""
	if len(args) > 1 {
		path = strings.Trim(args[1], "/")
		path = "/" + path
		kinds, required = t.n.optionsAt(method, path)
		if kinds == nil {
			t.errorf("No '%s' handler defined for '%s'\n", verb, args[1])
			return 1
		}
	}
	kinds = withFormats(kinds, true)
	kinds["noproxy"] = boolOption
	kinds["api_path"] = plainOption
	c := &toolCommand{name: verb, args: []string{"api_path"}, format: true}
	usage := t.usage(c, kinds, append(required, "api_path"))
	p, err := getOptions(kinds, []string{"api_path"}, args[1:], []string{"api_path"})
	if err != nil {
		t.fail(err, usage)
		return 255
	}
	std, err := takeFormats(p, true)
	if err != nil {
		t.fail(err, usage)
		return 255
	}
	path = "/" + strings.Trim(p.str("api_path"), "/")
	delete(p, "api_path")
	noproxy := p.yes("noproxy")
	delete(p, "noproxy")
	if other := otherNode(path, t.node); other != "" && !noproxy && t.n.nodes[other] != nil {
		return t.proxied(other, verb, path, p, std)
	}
	resp := t.call(method, path, p)
	if resp.Err != nil {
		return t.fail(resp.Err, usage)
	}
	if !std.quiet {
		t.printData(resp.Data, std)
	}
	return 0
}

// otherNode is the node that a path is of, when that is another one.
func otherNode(path, own string) string {
	parts := strings.Split(path, "/")
	if len(parts) > 2 && parts[1] == "nodes" && parts[2] != own && parts[2] != "localhost" {
		return parts[2]
	}
	return ""
}

// proxied is a call for another node: pvesh runs itself there over ssh, and
// joins the lines that it hears without their newlines. That is JSON only
// when a worker said nothing; else the whole text is the result.
func (t *tool) proxied(node, verb, path string, p values, std formats) int {
	args := []string{verb, path, "--noproxy", "--output-format", "json"}
	for _, k := range sortedKeys(p) {
		for _, v := range p[k] {
			args = append(args, "--"+k, v)
		}
	}
	var out bytes.Buffer
	code := t.n.RunOn(t.ctx, node, "pvesh", args, Stdio{Out: &out, Err: t.std.Err, Gone: t.std.Gone})
	if code != 0 {
		t.errorf("proxy handler failed: command '/usr/bin/ssh -e none -o 'HostKeyAlias=%s' root@%s -- pvesh --noproxy %s %s --output-format json' failed: exit code %d\n",
			node, node, verb, path, code)
		return 255
	}
	joined := strings.ReplaceAll(out.String(), "\n", "")
	if joined == "" {
		return 0
	}
	var data any = joined
	dec := json.NewDecoder(strings.NewReader(joined))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) == nil && !dec.More() {
		data = v
	}
	if !std.quiet {
		t.printData(data, std)
	}
	return 0
}
